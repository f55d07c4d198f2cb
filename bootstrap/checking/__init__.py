"""The demands of a manifest on machines and links: `noloco manifest check`."""
