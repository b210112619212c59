"""Offline work: files of requests in, files of answers out."""
