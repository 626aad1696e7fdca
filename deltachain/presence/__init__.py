"""Presence (RFC 6121) of replicas: an object that each renews, for those that cannot reach it.

It is no *heartbeat*, a publisher's signed word inside a chain, and no *lease*: nothing depends on
it but what people are shown.
"""
