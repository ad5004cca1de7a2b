"""A step's requests, the rows of them that the replay layers keep, and how the step is dispatched."""
