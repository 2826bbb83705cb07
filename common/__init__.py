"""What every Libra process shares: messages, the mesh, configuration, errors, logs."""
