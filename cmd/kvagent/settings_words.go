package main

// Values of --device. In all but the first, GPUs are opened in movers, one process for each, when an engine first
// registers memory of one.
const (
	deviceHost      = "host"       // shared memory and engines on CPUs only
	deviceAuto      = "auto"       // host in this process
	deviceHostMover = "host-mover" // host in a mover too
	deviceCUDA      = "cuda"       // as auto, but a start without CUDA is an error
)

var devices = []string{deviceAuto, deviceHost, deviceHostMover, deviceCUDA}

// Values of --integrity.
const (
	integrityFull   = "full"
	integrityHeader = "header"
)
