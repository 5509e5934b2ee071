"""One line in Accelerate, Transformers, Lightning, Fabric and Ray: each module imports its framework, nothing else does."""
