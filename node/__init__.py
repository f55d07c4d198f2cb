"""The daemon that one volunteer runs. Imports `protocol`, never hivemind directly."""
