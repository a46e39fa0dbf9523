"""The models of time and memory against measurements that others published, one source a file. Nothing is fitted."""
