"""The ground floor: files, progress, processor cores, the version. Loads no torch, Faiss or gRPC."""
