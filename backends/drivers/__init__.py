"""What starts and stops the engines of one unit: processes of this machine, a service manager, or a cluster."""
