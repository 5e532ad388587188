"""Loading and running a bundle: imports no pass, no template, no tracer and no model library."""
