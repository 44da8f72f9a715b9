// Package bench measures parts of kvagent, each against its reference in the same run.
package bench

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/lab/child"
)

// Command is bench with all its measurements.
func Command() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure a part against its reference in the same run"}
	bench.AddCommand(lookupCommand(), transferCommand(), policyCommand())
	return bench
}

// childProcess is a process of this program that serves a measurement. It reports that it is ready,
// and ends with its input, so it cannot outlive the measurement.
type childProcess struct {
	cmd *exec.Cmd
	in  io.Closer
	log child.Tail
}

const childReady = "ready\n"

// startChildProcess runs this program with these arguments, and waits until the child is ready.
func startChildProcess(args ...string) (*childProcess, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &childProcess{cmd: exec.Command(self, args...)}
	c.cmd.Stderr = &c.log
	in, inErr := c.cmd.StdinPipe()
	out, outErr := c.cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return nil, err
	}
	c.in = in
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	said := make([]byte, len(childReady))
	if _, err := io.ReadFull(out, said); err != nil {
		return nil, fmt.Errorf("a process of the measurement: %w\n%s", errors.Join(err, c.close()), c.log.String())
	}
	return c, nil
}

func (c *childProcess) close() error {
	err := c.in.Close()
	return errors.Join(err, c.cmd.Wait())
}

// serveParent is the child's side. It returns at the end of the input.
func serveParent(in io.Reader, out io.Writer) error {
	if _, err := io.WriteString(out, childReady); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, in)
	return err
}
