"""Publishing from trainers of other libraries."""
