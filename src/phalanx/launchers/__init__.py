"""Launchers: how ranks are started, one file each. See `base.Launcher`."""
