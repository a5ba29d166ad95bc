"""Runs commands with the UCX of a Debian release."""
