"""Dashboard: a web page that shows a chain, the replicas that follow it, and what is wrong."""
