"""Whether two deployments, or a deployment and one plain process, give the same answers (``paceline verify``)."""
