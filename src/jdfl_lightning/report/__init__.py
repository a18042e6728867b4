"""Run folders -> tables and figures. Reads files only."""
