"""Replicas: engines that Ray Serve places on a cluster."""
