"""Presence of replicas: a small object that each writes, for those that cannot reach it over HTTP.

*Presence* is the word of messaging (RFC 6121) for what this is: an entity's own word that it is
there and in which state, kept at a place that others read, renewed while it lives and withdrawn
when it leaves. It is no *heartbeat*: that is a publisher's signed word, inside a chain, for which
version is the newest. Nor is it a *lease*, which others would have to respect: nothing depends on a
presence but what people are shown.
"""
