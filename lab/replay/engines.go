package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/lab/child"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// engineProcess is one process of mock engines, driven over its standard input and output.
type engineProcess struct {
	incarnation int // number of the engine's starts up to this one
	engines     []*engine
	child       *child.Process
	in          io.WriteCloser
	encode      *json.Encoder
	log         child.Tail
	wanted      bool // its end is intended
}

// engine is one engine through all its incarnations.
type engine struct {
	number     int
	process    *engineProcess
	running    bool                          // a run was sent and not answered
	detached   bool                          // it had no agent at the end of its last run
	until      float64                       // of that run
	unfinished map[uint64]mockengine.Request // handed in and not over
	owed       []mockengine.Request          // of them, those whose process was killed between two stretches
	strike     *plannedStrike                // armed and not fired
	past, last mockengine.Stats              // of earlier incarnations, and of this one so far
	lost       uint64                        // wrong bytes reported by incarnations that ended before they counted them
	left       *mockengine.Report

	requests, blocks, own, pooled, others int
	preempted, aborted                    int
}

func (e *engine) stats() mockengine.Stats {
	s := e.past
	s.LookupTimes = nil
	s.LookupTimes.Merge(e.past.LookupTimes)
	s.Add(&e.last)
	return s
}

// engineEvent is a report, or with exited the end of a process.
type engineEvent struct {
	process *engineProcess
	report  *mockengine.Report
	exited  bool
	err     error
}

// maxReport bounds a line from an engine.
const maxReport = 64 << 20

// spawn starts a process and its engines.
func (r *replay) spawn(p *engineProcess) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	p.incarnation++
	p.wanted = false
	cmd := exec.Command(exe, "mock", "--drive")
	cmd.Stderr = &p.log
	if p.in, err = cmd.StdinPipe(); err != nil {
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
	p.child, p.encode = c, json.NewEncoder(p.in)
	r.readers.Go(func() { r.readReports(p, c, out) })
	for _, e := range p.engines {
		c := r.cfg
		c.Name = fmt.Sprintf("engine-%d.%d", e.number, p.incarnation)
		c.Device = r.set.engineDevice(e.number)
		c.Seed = r.set.seed + uint64(e.number)<<32 + uint64(p.incarnation)
		link := mockengine.LinkConfig{Session: r.node(e.number).session}
		if err := p.encode.Encode(&mockengine.Command{Op: "start", Engine: e.number, Config: &c,
			Link: &link}); err != nil {
			return fmt.Errorf("engine %d: %w\n%s", e.number, err, p.log.String())
		}
	}
	return nil
}

// readReports passes on a process's reports until it ends.
func (r *replay) readReports(p *engineProcess, c *child.Process, out io.ReadCloser) {
	lines := bufio.NewScanner(out)
	lines.Buffer(make([]byte, 64<<10), maxReport)
	for lines.Scan() {
		report := new(mockengine.Report)
		if json.Unmarshal(lines.Bytes(), report) != nil {
			continue // half a line: it was killed while it wrote
		}
		r.events <- engineEvent{process: p, report: report}
	}
	_ = out.Close() // it was read to its end
	<-c.Done
	r.events <- engineEvent{process: p, exited: true, err: c.Err}
}

// send sends an engine its next stretch. A process that cannot be written to has ended, and its end
// will be reported.
func (e *engine) send(c *mockengine.Command) {
	c.Engine = e.number
	if c.Op == "run" {
		c.Requests, e.owed = append(e.owed, c.Requests...), nil
	}
	for i := range c.Requests {
		e.unfinished[c.Requests[i].ID] = c.Requests[i]
	}
	if c.Op == "run" {
		e.running, e.until = true, c.Until
	}
	if err := e.process.encode.Encode(c); err != nil {
		return // processEnded hands it to the next incarnation
	}
}

// endAll ends running processes, and joins their readers. It kills those that do not end by
// themselves.
func (r *replay) endAll() {
	for _, p := range r.processes {
		p.wanted = true
		if p.in != nil {
			_ = p.in.Close()
		}
	}
	kill := func() {
		for _, p := range r.processes {
			if p.child != nil {
				p.child.Signal(syscall.SIGKILL)
			}
		}
	}
	if r.broken {
		kill()
	}
	timer := time.AfterFunc(enginesWithin, kill)
	defer timer.Stop()
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() { r.readers.Wait(); close(done) })
	for {
		select {
		case <-r.events:
		case <-done:
			wg.Wait()
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
