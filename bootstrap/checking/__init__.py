"""What a manifest asks of machines and links: `noloco manifest check`."""
