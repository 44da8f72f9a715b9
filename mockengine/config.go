package mockengine

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Limits of an engine.
const (
	MaxRanks   = 64
	MaxGroups  = 16
	MaxLayers  = 64
	MaxBlocks  = 1 << 24 // blocks of one engine
	maxStepGap = 1       // steps in flight with async scheduling, besides the one being scheduled
)

// Config configures an engine. Validate sets the defaults of zero fields.
type Config struct {
	Name  string // instance; an engine that starts again uses another one
	Model string // part of the identity: engines with equal identities share blocks
	Seed  uint64 // of the random generators

	Device string // where the workers' memory is: DeviceHost, DeviceCUDA or DeviceVirtual

	Ranks       int   // tensor-parallel workers, each with its own shard
	Blocks      int   // KV cache blocks that can be given out, over all groups
	BlockTokens int   // tokens one block hash stands for
	Groups      []int // KV cache groups: block size of each, in multiples of BlockTokens
	BlockBytes  int   // bytes of one block on one rank, all layers
	Layers      int   // segments of a block

	StepTokens int     // token budget of a step
	MaxRunning int     // requests that run at once
	Async      bool    // async scheduling: the next step is scheduled before this one's output is known
	Drafts     int     // speculative tokens per step and request
	AcceptRate float64 // share of speculative tokens that are accepted, 0 to 1

	StepTime  time.Duration // virtual time of a step
	TokenTime time.Duration // virtual time of each prompt token in it
	KernelLag time.Duration // wall time: a kernel starts up to that much later, at random

	LookupTimeout time.Duration // wall time: longest wait for a look-up's answer, then it is a miss
	LoadDeadline  time.Duration // wall time: a longer load is abandoned
	Events        int           // events of a worker, used in turn
	Revokes       int           // revocation words, and so the maximum of saves in flight
}

// Validate sets defaults and returns an error that names the field that is out of range.
func (c *Config) Validate() error {
	c.setDefaults()
	for _, f := range []struct {
		name     string
		v        int
		min, max int
	}{
		{"ranks", c.Ranks, 1, MaxRanks}, {"engine-blocks", c.Blocks, 1, MaxBlocks},
		{"block-tokens", c.BlockTokens, 1, 1 << 20}, {"layers", c.Layers, 1, MaxLayers},
		{"groups", len(c.Groups), 1, MaxGroups}, {"step-tokens", c.StepTokens, 1, 1 << 24},
		{"max-running", c.MaxRunning, 1, 1 << 16}, {"spec", c.Drafts, 0, 64},
		{"events", c.Events, 4, 1 << 16}, {"revokes", c.Revokes, 1, 1 << 16},
		{"block-bytes", c.BlockBytes, wordBytes * c.Layers, 1 << 30},
	} {
		if f.v < f.min || f.v > f.max {
			return fmt.Errorf("%s is %d, allowed are %d to %d", f.name, f.v, f.min, f.max)
		}
	}
	if c.BlockBytes%c.Layers != 0 {
		return fmt.Errorf("block-bytes is %d, allowed are multiples of %d layers", c.BlockBytes, c.Layers)
	}
	if c.AcceptRate < 0 || c.AcceptRate > 1 {
		return fmt.Errorf("accept rate is %v, allowed are 0 to 1", c.AcceptRate)
	}
	for g, scale := range c.Groups {
		if scale < 1 || scale > 64 {
			return fmt.Errorf("group %d has %d times block-tokens, allowed are 1 to 64", g, scale)
		}
		if _, err := newShape(scale*c.BlockTokens, c.BlockBytes/c.Layers); err != nil {
			return fmt.Errorf("group %d: %w", g, err)
		}
	}
	if d := []string{DeviceHost, DeviceCUDA, DeviceVirtual}; !slices.Contains(d, c.Device) {
		return fmt.Errorf("device is %q, allowed are %s", c.Device, strings.Join(d, ", "))
	}
	if c.Name == "" || c.Model == "" {
		return errors.New("name and model must be given")
	}
	return nil
}

func (c *Config) setDefaults() {
	for _, d := range []struct {
		v   *int
		def int
	}{
		{&c.Ranks, 1}, {&c.Blocks, 2000}, {&c.BlockTokens, TraceBlock}, {&c.BlockBytes, 16384}, {&c.Layers, 4},
		{&c.StepTokens, 8192}, {&c.MaxRunning, 128}, {&c.Events, 64}, {&c.Revokes, 1024},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&c.StepTime, 20 * time.Millisecond}, {&c.TokenTime, 10 * time.Microsecond},
		{&c.LookupTimeout, 50 * time.Millisecond}, {&c.LoadDeadline, 2 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	if c.Device == "" {
		c.Device = DeviceHost
	}
	if len(c.Groups) == 0 {
		c.Groups = []int{1}
	}
}

// align returns the number of tokens that is whole blocks in every group.
func (c *Config) align() int {
	a := 1
	for _, s := range c.Groups {
		a = a / gcd(a, s) * s
	}
	return a * c.BlockTokens
}

// BlocksFor returns the number of blocks that a request of that many tokens needs in all groups
// together.
func (c *Config) BlocksFor(tokens int) (n int) {
	for _, s := range c.Groups {
		n += ceilDiv(tokens, s*c.BlockTokens)
	}
	return n
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
