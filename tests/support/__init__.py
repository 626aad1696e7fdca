"""Fault injection, emulated servers and models for tests."""
