// Package bench measures parts of kvagent, each against its reference in the same run.
package bench

import (
	"bufio"
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
	bench.AddCommand(lookupCommand(), transferCommand(), policyCommand(), recoverCommand())
	return bench
}

// childProcess is a process of this program that serves a measurement. It reports that it is ready,
// then executes each line of its input, and ends with its input, so it cannot outlive the
// measurement.
type childProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	log child.Tail
}

const childDone = "done\n"

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
	c.in, c.out = in, bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	if err := c.await(); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// await waits until the child has executed a line.
func (c *childProcess) await() error {
	if reply, err := c.out.ReadString('\n'); err != nil || reply != childDone {
		return fmt.Errorf("a process of the measurement answered %q: %w", reply,
			errors.Join(err, errors.New(c.log.String())))
	}
	return nil
}

func (c *childProcess) close() error {
	err := c.in.Close()
	return errors.Join(err, c.cmd.Wait())
}

// serveParent is the child's side: it calls do with each line. It returns at the end of the input,
// or when writing to out fails.
func serveParent(in io.Reader, out io.Writer, do func(line string) error) error {
	lines := bufio.NewScanner(in)
	for {
		if _, err := io.WriteString(out, childDone); err != nil {
			return err
		}
		if !lines.Scan() {
			return lines.Err()
		}
		if err := do(lines.Text()); err != nil {
			return err
		}
	}
}
