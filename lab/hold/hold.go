// Package hold serves an agent that stops in the middle of a load when it is told to, for tests of
// what engines do then.
package hold

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/settings"
)

const (
	poolBytes   = 64 << 20 // the size of the agent's pool
	keepPercent = 10       // of the pool: what requests may keep, as by serve's default
)

// Command returns the process that only tests start. It serves until its input ends, and reads
// lines:
//
//	hold N    lets N copies of loads pass, and holds those after them; it says "held" at the first
//	release   starts the held copies, and holds none any more
//
// It answers each with "ok".
func Command() *cobra.Command {
	return &cobra.Command{
		Use: "hold DIR", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return serve(args[0], cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}

func serve(dir string, in io.Reader, out io.Writer) (err error) {
	p, err := dram.Open(dram.Options{Bytes: poolBytes, HugePages: dram.Off})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if err := p.Populated(); err != nil {
		return err
	}
	_, fd := p.Arena()
	h, err := host.Open(host.Options{ArenaFD: fd, ArenaSize: p.Info().Bytes})
	if err != nil {
		return err
	}
	d := newDevice(h, func() { fmt.Fprintln(out, "held") })
	defer func() { err = errors.Join(err, d.Close(cudaipc.AllPeers)) }()
	a, err := agent.New(agent.Config{Dir: dir, KeepPercent: keepPercent}, p, d, zap.NewNop())
	if err != nil {
		return err
	}
	defer a.Close()
	defer func() { err = errors.Join(err, d.release()) }()
	if err := a.Start(); err != nil {
		return err
	}
	return obey(d, in, out)
}

func obey(d *device, in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var pass int
		switch _, err := fmt.Sscanf(lines.Text(), "hold %d", &pass); {
		case lines.Text() == "release":
			if err := d.release(); err != nil {
				return err
			}
		case err == nil && pass >= 0:
			d.hold(pass)
		default:
			return settings.Invalid(fmt.Errorf("%q, allowed: hold N, release", lines.Text()))
		}
		fmt.Fprintln(out, "ok")
	}
	return lines.Err()
}
