"""One learner per kind of head: which labels it has, which losses, and how it is drafted with and exported."""
