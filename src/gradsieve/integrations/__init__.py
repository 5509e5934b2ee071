"""Integrations: Accelerate, Transformers, Lightning, Fabric, Ray. Each module imports its own framework."""
