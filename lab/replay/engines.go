package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/lab/child"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// engine is one mock engine through all its incarnations, each a process that is driven over its
// standard input and output.
type engine struct {
	number      int
	incarnation int // number of its starts up to this one
	child       *child.Process
	in          io.WriteCloser
	encode      *json.Encoder
	log         child.Tail
	wanted      bool // its end is intended

	leaving    bool                          // it was told to leave
	running    bool                          // a run was sent and not answered
	detached   bool                          // it had no agent at the end of its last run
	until      float64                       // of that run
	unfinished map[uint64]mockengine.Request // handed in and not over
	owed       []mockengine.Request          // of them, those of one that was killed between two stretches
	strike     *plannedStrike                // armed and not fired
	past, last mockengine.Stats              // of earlier incarnations, and of this one so far
	lost       uint64                        // wrong bytes reported by incarnations that ended before they counted them
	left       *mockengine.Report

	requests, blocks, own, pooled, others int
	aborted                               int
}

// instance is the name by which the agent has an incarnation.
func (e *engine) instance() string { return fmt.Sprintf("engine-%d.%d", e.number, e.incarnation) }

func (e *engine) stats() mockengine.Stats {
	s := e.past
	s.Add(&e.last)
	return s
}

// engineEvent is a report, or with exited the end of an incarnation.
type engineEvent struct {
	engine *engine
	report *mockengine.Report
	exited bool
	err    error
}

// maxReport bounds a line from an engine.
const maxReport = 64 << 20

// spawn starts an incarnation of an engine.
func (r *replay) spawn(e *engine) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	e.incarnation++
	e.wanted = false
	cmd := exec.Command(exe, "mock", "--drive")
	cmd.Stderr = &e.log
	if e.in, err = cmd.StdinPipe(); err != nil {
		return err
	}
	out, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout = theirs
	c, err := child.Start(cmd)
	_ = theirs.Close() // the process has it
	if err != nil {
		_ = out.Close() // nothing was read
		return err
	}
	e.child, e.encode = c, json.NewEncoder(e.in)
	r.readers.Go(func() { r.readReports(e, c, out) })
	cfg := r.cfg
	cfg.Name, cfg.Device = e.instance(), r.set.engineDevice(e.number)
	cfg.Seed = r.set.seed + uint64(e.number)<<32 + uint64(e.incarnation)
	link := mockengine.LinkConfig{Session: r.node(e.number).session}
	if err := e.encode.Encode(&mockengine.Command{Op: "start", Config: &cfg, Link: &link}); err != nil {
		return fmt.Errorf("engine %d: %w\n%s", e.number, err, e.log.String())
	}
	return nil
}

// readReports passes on the reports of an incarnation until it ends.
func (r *replay) readReports(e *engine, c *child.Process, out io.ReadCloser) {
	lines := bufio.NewScanner(out)
	lines.Buffer(make([]byte, 64<<10), maxReport)
	for lines.Scan() {
		report := new(mockengine.Report)
		if json.Unmarshal(lines.Bytes(), report) != nil {
			continue // half a line: it was killed while it wrote
		}
		r.events <- engineEvent{engine: e, report: report}
	}
	_ = out.Close() // it was read to its end
	<-c.Done
	r.events <- engineEvent{engine: e, exited: true, err: c.Err}
}

// send sends an engine its next stretch. A process that cannot be written to has ended, and its end
// will be reported.
func (e *engine) send(c *mockengine.Command) {
	if c.Op == "run" {
		c.Requests, e.owed = append(e.owed, c.Requests...), nil
	}
	for i := range c.Requests {
		e.unfinished[c.Requests[i].ID] = c.Requests[i]
	}
	if c.Op == "run" {
		e.running, e.until = true, c.Until
	}
	_ = e.encode.Encode(c) // after an error engineEnded hands it to the next incarnation
}

// leave tells an engine to leave; its end is intended from then on.
func (e *engine) leave() {
	e.leaving, e.wanted = true, true
	e.send(&mockengine.Command{Op: "leave"})
}

// endAll ends running processes, and joins their readers. It kills those that do not end by
// themselves.
func (r *replay) endAll() {
	for _, e := range r.engines {
		e.wanted = true
		if e.in != nil {
			_ = e.in.Close()
		}
	}
	kill := func() {
		for _, e := range r.engines {
			if e.child != nil {
				e.child.Signal(syscall.SIGKILL)
			}
		}
	}
	if r.broken {
		kill()
	}
	timer := time.AfterFunc(enginesWithin, kill)
	defer timer.Stop()
	done := make(chan struct{})
	go func() { r.readers.Wait(); close(done) }()
	for {
		select {
		case <-r.events:
		case <-done:
			return
		}
	}
}

// engineDevice returns where an engine's memory is. With GPUs every second engine has virtual
// memory, like one whose PyTorch has expandable segments, and they share blocks.
func (s *scenario) engineDevice(number int) string {
	switch {
	case s.device != settings.DeviceCUDA:
		return mockengine.DeviceHost
	case number%2 == 1:
		return mockengine.DeviceVirtual
	}
	return mockengine.DeviceCUDA
}

// openImports returns how many allocations, pieces and events of engines the agent's movers have
// open, as of their last report, at most some seconds ago.
func openImports(st *admin.Status) (n int) {
	for i := range st.Movers {
		if gpu := st.Movers[i].GPU; gpu != nil {
			n += int(gpu.Imports)
		}
	}
	return n
}
