package mockengine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"
)

// A driver sends commands to engines and receives reports, one JSON object a line each way.
// Commands for one engine are executed in order, those for several concurrently.

// Command is one line to a process of engines.
type Command struct {
	Op     string `json:"op"` // start, run, leave
	Engine int    `json:"engine"`

	// start
	Config *Config     `json:"config,omitempty"`
	Link   *LinkConfig `json:"link,omitempty"`

	// run: until the virtual time, in ms, or with -1 until nothing is left; then up to SettleMS for
	// saves to end
	Until    float64   `json:"until,omitempty"`
	SettleMS int       `json:"settle_ms,omitempty"`
	Requests []Request `json:"requests,omitempty"`
	Strike   *Strike   `json:"strike,omitempty"`
}

// Strike is a SIGKILL that an engine sends at a moment when the agent has a job of it.
type Strike struct {
	Agent  bool `json:"agent,omitempty"`  // to the agent; otherwise to the engine's own process
	Middle bool `json:"middle,omitempty"` // in the middle of a step's kernels, on which a job waits
	After  int  `json:"after"`            // jobs from now on
}

// Report is one line back.
type Report struct {
	Op     string `json:"op"` // ran, left, wrong, strike, error
	Engine int    `json:"engine"`

	Outcomes []Outcome `json:"outcomes,omitempty"`
	Stats    *Stats    `json:"stats,omitempty"`
	InUse    int       `json:"in_use,omitempty"` // left: blocks that are not free
	Attached bool      `json:"attached,omitempty"`
	PID      int       `json:"pid,omitempty"` // strike: of the process that was hit
	Text     string    `json:"text,omitempty"`
}

// Limits of a driven process.
const (
	maxCommand  = 64 << 20         // bytes of a line
	startWithin = 3 * time.Second  // for an agent to appear; the engine runs without one, too
	drainWithin = 30 * time.Second // for jobs to end when an engine leaves
	maxEngines  = 1024             // in one process
)

// Drive executes the commands from in until it ends, and writes reports to out. Engines that have
// not left are then abandoned: the process ends, as in a crash.
func Drive(in io.Reader, out io.Writer) error {
	d := &driver{out: json.NewEncoder(out), engines: make(map[int]*driven)}
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 64<<10), maxCommand)
	for lines.Scan() {
		var c Command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return fmt.Errorf("command: %w", err)
		}
		if err := d.do(&c); err != nil {
			return fmt.Errorf("command %q for engine %d: %w", c.Op, c.Engine, err)
		}
	}
	for _, g := range d.engines {
		close(g.commands)
	}
	d.wg.Wait()
	return lines.Err()
}

type driver struct {
	mu      sync.Mutex // of out
	out     *json.Encoder
	engines map[int]*driven
	wg      sync.WaitGroup
}

// driven is one engine and its goroutine.
type driven struct {
	d        *driver
	number   int
	commands chan *Command
	engine   *Engine
	link     *Link
	workers  *Workers
	strike   *Strike
}

func (d *driver) do(c *Command) error {
	if c.Op == "start" {
		return d.start(c)
	}
	g := d.engines[c.Engine]
	if g == nil {
		return errors.New("no such engine")
	}
	select {
	case g.commands <- c:
		return nil
	default:
		return errors.New("too many commands at once")
	}
}

func (d *driver) start(c *Command) error {
	switch {
	case d.engines[c.Engine] != nil || len(d.engines) == maxEngines:
		return errors.New("it runs, or there are too many")
	case c.Config == nil || c.Link == nil:
		return errors.New("config and link must be given")
	}
	g, err := d.assemble(c)
	if err != nil {
		return err
	}
	d.engines[c.Engine] = g
	d.wg.Go(g.loop)
	return nil
}

// assemble creates an engine; its link begins to connect.
func (d *driver) assemble(c *Command) (*driven, error) {
	if err := c.Config.Validate(); err != nil {
		return nil, err
	}
	w, err := NewWorkers(c.Config)
	if err != nil {
		return nil, err
	}
	g := &driven{d: d, number: c.Engine, commands: make(chan *Command, 64), workers: w}
	g.link = NewLink(*c.Config, *c.Link, w)
	g.engine = NewEngine(*c.Config, g.link, w)
	g.engine.OnWrong = func(text string) { g.report(&Report{Op: "wrong", Text: text}) }
	g.engine.OnSubmit = g.submitted
	return g, nil
}

// loop executes one engine's commands.
func (g *driven) loop() {
	ctx, stop := context.WithTimeout(context.Background(), startWithin)
	defer stop()
	_ = g.link.Wait(ctx) // without an agent it runs, too
	for c := range g.commands {
		switch c.Op {
		case "run":
			g.run(c)
		case "leave":
			g.leave()
			return
		default:
			g.report(&Report{Op: "error", Text: fmt.Sprintf("op is %q, allowed are start, run and leave", c.Op)})
		}
	}
}

func (g *driven) run(c *Command) {
	if c.Strike != nil {
		g.arm(c.Strike)
	}
	g.engine.Add(c.Requests...)
	g.engine.Run(c.Until)
	g.engine.Settle(time.Duration(c.SettleMS) * time.Millisecond)
	g.report(g.state("ran"))
}

func (g *driven) state(op string) *Report {
	s := g.engine.Stats()
	return &Report{Op: op, Outcomes: g.engine.Outcomes(), Stats: &s, Attached: g.link.attached() != nil}
}

// leave ends the engine in order: jobs, sessions, memory.
func (g *driven) leave() {
	g.engine.Drain(drainWithin)
	for _, ev := range g.link.Close() {
		g.engine.over(ev)
	}
	r := g.state("left")
	r.InUse = g.engine.BlocksInUse()
	g.workers.Close()
	g.report(r)
}

func (g *driven) report(r *Report) {
	r.Engine = g.number
	g.d.mu.Lock()
	defer g.d.mu.Unlock()
	if err := g.d.out.Encode(r); err != nil {
		return // the end of this process's input ends it
	}
}

// arm prepares a strike.
func (g *driven) arm(s *Strike) {
	g.strike = s
	g.engine.Trap = nil
	if s.Middle {
		g.engine.Trap = g.hit
	}
}

// submitted is called after each submitted job.
func (g *driven) submitted() {
	if g.strike == nil || g.strike.Middle {
		return
	}
	if g.strike.After--; g.strike.After < 0 {
		g.hit()
	}
}

// hit strikes if the agent really has a job now, otherwise at the next opportunity.
func (g *driven) hit() {
	jobs := g.engine.Jobs() - len(g.link.Events())
	pid := syscall.Getpid()
	if a := g.link.attached(); g.strike.Agent && a == nil {
		return
	} else if g.strike.Agent {
		pid = a.pid
	}
	if jobs <= 0 || pid <= 1 {
		return
	}
	g.strike, g.engine.Trap = nil, nil
	g.report(&Report{Op: "strike", PID: pid})
	err := syscall.Kill(pid, syscall.SIGKILL)
	if err != nil && !errors.Is(err, syscall.ESRCH) { // it may have ended meanwhile
		g.report(&Report{Op: "error", Text: fmt.Sprintf("kill %d: %v", pid, err)})
	}
}
