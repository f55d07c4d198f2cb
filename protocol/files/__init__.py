"""Files and folders of this program: written whole or not at all, in places that others cannot misuse."""
