package mockengine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"
)

// A driver sends commands to an engine, which executes them in order, and receives reports, one
// JSON object a line each way.

// Command is one line to an engine.
type Command struct {
	Op string `json:"op"` // start, run, leave

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
	Op string `json:"op"` // ran, left, wrong, strike, error

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
)

// Drive executes the commands from in until one is to leave, or in ends, and writes reports to out.
// An engine that has not left is then abandoned: the process ends, as in a crash.
func Drive(in io.Reader, out io.Writer) (err error) {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 64<<10), maxCommand)
	var g *driven
	for lines.Scan() {
		var c Command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return fmt.Errorf("command: %w", err)
		}
		switch {
		case g == nil && c.Config != nil && c.Link != nil:
			if g, err = assemble(*c.Config, *c.Link, out); err != nil {
				return err
			}
			ctx, stop := context.WithTimeout(context.Background(), startWithin)
			_ = g.link.Wait(ctx) // without an agent it runs, too
			stop()
		case g != nil && c.Op == "run":
			g.run(&c)
		case g != nil && c.Op == "leave":
			g.leave()
			return nil
		default:
			return fmt.Errorf("op is %q, allowed are start, with config and link, then run and leave", c.Op)
		}
	}
	return lines.Err()
}

// driven is an engine that reports what it does.
type driven struct {
	out     *json.Encoder
	engine  *Engine
	link    *Link
	workers *Workers
	strike  *Strike
}

// assemble creates an engine; its link begins to connect.
func assemble(cfg Config, where LinkConfig, out io.Writer) (*driven, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w, err := NewWorkers(&cfg)
	if err != nil {
		return nil, err
	}
	g := &driven{out: json.NewEncoder(out), workers: w, link: NewLink(cfg, where, w)}
	g.engine = NewEngine(cfg, g.link, w)
	g.engine.OnWrong = func(text string) { g.report(&Report{Op: "wrong", Text: text}) }
	g.engine.OnSubmit = g.submitted
	return g, nil
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

// report writes a line. That nobody reads it is no error: the end of this process's input ends it.
func (g *driven) report(r *Report) { _ = g.out.Encode(r) }

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
