"""Readers of a run's journal that write for TensorBoard, W&B, MLflow, trackio and Kubeflow."""
