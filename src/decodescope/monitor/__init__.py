"""A running model watched: metrics, rules and dashboards, and reading what other servers export."""
