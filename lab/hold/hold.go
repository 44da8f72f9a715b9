// Package hold serves an agent that stops in the middle of a load when it is told to, or whose disk
// is slow, for tests of what engines do then.
package hold

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/settings"
)

const (
	poolBytes   = 64 << 20 // the size of the agent's pool
	keepPercent = 10       // of the pool: what requests may keep, as by serve's default
	diskTakes   = 200 * time.Millisecond
)

// Command returns the process that only tests start. It serves until its input ends, and reads
// lines:
//
//	hold N    lets N copies of loads pass, and holds those after them; it says "held" at the first
//	release   starts the held copies, and holds none any more
//
// It answers each with "ok". Its disk, if it has one, takes up to diskTakes for each call.
func Command() *cobra.Command {
	return &cobra.Command{
		Use: "hold DIR [DISK]", Hidden: true, Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return serve(args[0], args[1:], cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}

func serve(dir string, disks []string, in io.Reader, out io.Writer) (err error) {
	p, err := dram.Open(dram.Options{Bytes: poolBytes, HugePages: dram.Off})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if err := p.Populated(); err != nil {
		return err
	}
	arena, _ := p.Arena()
	d := newDevice(host.Open(arena), func() { fmt.Fprintln(out, "held") })
	defer func() { err = errors.Join(err, d.Close()) }()
	all, end, err := below(p, disks)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	a, err := agent.New(agent.Config{Dir: dir}, all, d, zap.NewNop())
	if err != nil {
		return err
	}
	a.Plug(guests.Join(a, all, guests.Options{KeepPercent: keepPercent}, zap.NewNop()))
	defer a.Close()
	defer func() { err = errors.Join(err, d.release()) }()
	if err := a.Start(); err != nil {
		return err
	}
	return obey(d, in, out)
}

// below puts slow disks below memory.
func below(p *dram.Pool, disks []string) (all pool.Memory, end func() error, err error) {
	if len(disks) == 0 {
		return p, func() error { return nil }, nil
	}
	store, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: disks[0], Bytes: 4 * poolBytes}}})
	if err != nil {
		return nil, nil, err
	}
	slow, err := fault.New(store, fault.Options{Rates: map[fault.Kind]float64{fault.Delay: 1}, MaxDelay: diskTakes})
	if err != nil {
		return nil, nil, errors.Join(err, store.Close())
	}
	tiers := []tier.Tier{{Name: "disk", Store: slow, Local: true, Write: tier.OnSave}}
	stack, err := tier.Open(p, tiers, tier.Options{PrefetchBytes: poolBytes / 2, Node: "hold"})
	return stack, func() error { return errors.Join(stack.Close(), store.Close()) }, err
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

// device is a host device whose loads can be held back: their copies wait between submission and
// start. Copies of one peer keep their order, because all later ones are held too.
type device struct {
	*host.Device
	told func() // called when the first copy is held, with mu held

	mu      sync.Mutex
	pass    int // copies that still pass; below 0: all
	waiting []*heldCopy
}

// peer is a peer of the device.
type peer struct {
	cudaipc.Peer
	of *device
}

type heldCopy struct {
	peer    *peer
	copy    *cudaipc.Copy
	started chan cudaipc.Ticket // has the ticket once there is one
}

func newDevice(d *host.Device, told func()) *device { return &device{Device: d, told: told, pass: -1} }

// Import implements cudaipc.Device.
func (d *device) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	p, err := d.Device.Import(im)
	return &peer{p, d}, err
}

// hold lets the next copies of loads pass, and holds those after them until release.
func (d *device) hold(pass int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pass = pass
}

// release starts the held copies, and holds none any more.
func (d *device) release() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range d.waiting {
		t, err := h.peer.Peer.Copy(h.copy)
		if err != nil {
			return err
		}
		h.started <- t
	}
	d.waiting, d.pass = nil, -1
	return nil
}

// Copy implements cudaipc.Peer.
func (p *peer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	d := p.of
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.Dir != cudaipc.Scatter || d.pass < 0 {
		return p.Peer.Copy(c)
	}
	if d.pass > 0 {
		d.pass--
		return p.Peer.Copy(c)
	}
	if len(d.waiting) == 0 {
		d.told()
	}
	h := &heldCopy{p, c, make(chan cudaipc.Ticket, 1)}
	d.waiting = append(d.waiting, h)
	return h.done, nil
}

// done is the ticket of a held copy.
func (h *heldCopy) done(timeout time.Duration) (cudaipc.Done, bool, error) {
	select {
	case t := <-h.started:
		h.started <- t
		return t(timeout)
	case <-time.After(timeout):
		return cudaipc.Done{}, false, nil
	}
}
