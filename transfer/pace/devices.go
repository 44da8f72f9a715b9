package pace

import (
	"maps"
	"slices"
	"sync"
)

// CPU is the name of the CPUs among the devices.
const CPU = "cpu"

// Devices are the pacers of a node: copies on one GPU do not slow the engines of another.
type Devices struct {
	setting int64

	mu struct {
		sync.Mutex
		ended bool
		all   map[string]*Pacer // by the device's name
	}
}

// NewDevices makes the pacers of a node, of which that of the CPUs exists.
func NewDevices(setting int64, cpu *Pacer) *Devices {
	d := &Devices{setting: setting}
	d.mu.all = map[string]*Pacer{CPU: cpu}
	return d
}

// Of returns the pacer of a device.
func (d *Devices) Of(device string) *Pacer {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.mu.all[device]
	if p == nil {
		p = New(d.setting, nil)
		d.mu.all[device] = p
		if d.mu.ended {
			p.End()
		}
	}
	return p
}

// End lifts all limits for good.
func (d *Devices) End() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.ended = true
	for _, p := range d.mu.all {
		p.End()
	}
}

// Report returns the state of each device's pacer, by name.
func (d *Devices) Report() (out []Report) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, device := range slices.Sorted(maps.Keys(d.mu.all)) {
		r := d.mu.all[device].Report()
		r.Device = device
		out = append(out, r)
	}
	return out
}
