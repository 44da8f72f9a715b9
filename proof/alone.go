package proof

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// checkWithin is the time limit of a check. After it, the check's process and its children are
// killed.
const checkWithin = 150 * time.Second

// childEnv is a checkName in a process that runs one check. The engines that it starts have it,
// too.
const childEnv = "KVAGENT_PROOF_CHILD"

// checkName selects a check.
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
	cmd := exec.CommandContext(ctx, o.Command[0], o.Command[1:]...)
	cmd.Env, cmd.Stderr = append(os.Environ(), childEnv+"="+string(order)), os.Stderr
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

// Child reports whether a proof has started this process. Then it has run one check and printed its
// line. In a process that plays an engine it does not return.
func Child() (is bool, err error) {
	devicetest.Child()
	text, is := os.LookupEnv(childEnv)
	if !is {
		return false, nil
	}
	var name checkName
	if err := json.Unmarshal([]byte(text), &name); err != nil {
		return true, err
	}
	o := Options{Quick: name.Quick}
	for i := range checks {
		if checks[i].name == name.Name {
			return true, json.NewEncoder(os.Stdout).Encode(o.do(context.Background(), &checks[i]))
		}
	}
	return true, fmt.Errorf("check %q", name.Name)
}
