"""One line in Accelerate, Transformers, Lightning, Fabric and Ray. Each module imports its own framework."""
