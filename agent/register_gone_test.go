package agent

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// slowImports is a device whose imports end when they are told that their peer is gone, and not
// before.
type slowImports struct {
	cudaipc.Device
	t     *testing.T
	begun chan struct{}
}

func (d slowImports) Import(im cudaipc.Import) error {
	d.begun <- struct{}{}
	select {
	case <-im.Gone:
	case <-time.After(patience):
		d.t.Error("an import is not told that its engine is gone")
	}
	return d.Device.Import(im) // may come to its end all the same
}

// An engine that dies, or hangs up, while its memory is being imported does not keep the agent
// waiting for that.
func TestDeathDuringImport(t *testing.T) {
	for name, leave := range map[string]func(r *rig) func(){
		"killed": func(r *rig) func() {
			cmd, _ := r.startVictim("importing")
			return func() { check(r.t, cmd.Process.Kill()) }
		},
		"hung up": func(r *rig) func() {
			c := r.dial()
			c.sendRegistration(register("engine"))
			return c.close
		},
		"says no more": func(r *rig) func() {
			c := r.dial()
			c.sendRegistration(register("engine"))
			return func() { check(r.t, c.conn.CloseWrite()) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			slow := slowImports{t: t, begun: make(chan struct{}, 1)}
			r := newRig(t, withDevice(func(d cudaipc.Device) cudaipc.Device {
				slow.Device = d
				return slow
			}))
			end := leave(r)
			<-slow.begun
			end()
			r.waitFor("the engine is gone", func(s admin.Status) bool { return s.Sessions == 0 && s.Regions == 0 && s.Engines == 0 })
		})
	}
}

// sendRegistration sends all parts of a worker's registration.
func (c *client) sendRegistration(m *ipc.Register) {
	c.t.Helper()
	regions, fds, segments := c.prepare(m)
	c.send(m)
	c.send(regions, fds...)
	c.send(segments)
}
