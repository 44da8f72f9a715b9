package proof

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// checkWithin is the time limit of a check. After it, the check's process and its children are
// killed.
const checkWithin = 150 * time.Second

// checkChild is the start of childEnv's value in a process that runs one check; a checkName
// follows.
const checkChild = "check "

// checkName selects the check.
type checkName struct {
	Name  string `json:"name"`
	Quick bool   `json:"quick"`
}

// line runs a check in a process of its own, so that a hanging driver, or an error that no later
// call survives, costs only that check. A single selected check runs in this process.
func (o *Options) line(ctx context.Context, c *check) *Line {
	if o.Only != "" {
		return o.do(ctx, c)
	}
	begin := time.Now()
	l := &Line{Name: c.name}
	if err := o.alone(ctx, l); err != nil {
		l.OK, l.Error, l.Seconds = false, err.Error(), time.Since(begin).Seconds()
	}
	return l
}

// alone runs the check of a line in another process.
func (o *Options) alone(ctx context.Context, l *Line) error {
	ctx, stop := context.WithTimeout(ctx, checkWithin)
	defer stop()
	order, err := json.Marshal(checkName{l.Name, o.Quick})
	if err != nil {
		return err
	}
	command := o.self()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env, cmd.Stderr = append(os.Environ(), childEnv+"="+checkChild+string(order)), os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // for children that hold its output, too
	text, err := cmd.Output()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("it did not end within %v: its process was killed", checkWithin)
	case err != nil:
		return fmt.Errorf("its process: %w", err)
	}
	return json.Unmarshal(text, l)
}

// playCheck runs a check and prints its line.
func playCheck(order string) error {
	var c checkName
	if err := json.Unmarshal([]byte(strings.TrimPrefix(order, checkChild)), &c); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o := Options{Command: append([]string{self}, os.Args[1:]...), Quick: c.Quick}
	for i := range checks {
		if checks[i].name == c.Name {
			return json.NewEncoder(os.Stdout).Encode(o.do(context.Background(), &checks[i]))
		}
	}
	return fmt.Errorf("check %q", c.Name)
}
