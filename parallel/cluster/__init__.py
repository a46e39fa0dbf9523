"""Devices and links as data: rates, tiers, and the seconds of a transfer. Each file imports only earlier ones:

hardware, links.
"""
