"""``ucxkv doctor``: what on this machine, or between two, keeps pulls from working well."""
