"""The way of one op: submission, dispatcher, kernel actors, lanes and contexts."""
