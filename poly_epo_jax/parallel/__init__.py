"""Several devices and several processes: hosts, devices, meshes."""
