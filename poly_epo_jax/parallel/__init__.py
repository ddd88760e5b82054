"""Multiple devices and processes: device specifications, meshes, sharding, and communication between processes."""
