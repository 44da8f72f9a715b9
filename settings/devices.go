package settings

// Values of --device. In all but the first, each GPU is opened in a mover when an engine first
// registers memory on it.
const (
	DeviceHost      = "host"       // shared memory and engines on CPUs only
	DeviceAuto      = "auto"       // host in this process
	DeviceHostMover = "host-mover" // host in a mover too
	DeviceCUDA      = "cuda"       // as auto, but a start without CUDA is an error
)

// Devices are all values of --device.
var Devices = []string{DeviceAuto, DeviceHost, DeviceHostMover, DeviceCUDA}

// Values of --integrity.
const (
	IntegrityFull   = "full"
	IntegrityHeader = "header"
)
