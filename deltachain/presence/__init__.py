"""Presence (RFC 6121): an object that each replica renews.

It is no *heartbeat*, a publisher's signed word inside a chain, and no *lease*: nothing depends on
it but what people are shown.
"""
