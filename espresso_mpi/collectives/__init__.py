"""Collectives: one file each, one contract (``base``); routes compiled by ``schedule`` and run by ``executor``."""
