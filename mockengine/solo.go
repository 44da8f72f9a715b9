package mockengine

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// SoloOptions configures Solo.
type SoloOptions struct {
	Attach    time.Duration // longest wait for an agent
	Hold      bool          // stay registered after the last request until ctx is done
	KillAfter int           // kill this process after this many jobs, with one in flight; 0: never
}

// Solo runs requests through one engine against an agent and writes reports to out, as Drive does.
// When ctx is done it leaves the agent in order, and reports requests that were not run.
func Solo(ctx context.Context, cfg Config, where LinkConfig, requests []Request, o SoloOptions, out io.Writer) error {
	g, err := assemble(cfg, where, out)
	if err != nil {
		return err
	}
	wait, stop := context.WithTimeout(ctx, o.Attach)
	defer stop()
	if err := g.link.Wait(wait); err != nil {
		g.leave()
		return fmt.Errorf("no agent: %w", err)
	}
	g.engine.Stop = func() bool { return ctx.Err() != nil }
	if o.KillAfter > 0 {
		g.arm(&Strike{After: o.KillAfter})
	}
	g.run(&Command{Until: -1, SettleMS: 1000, Requests: requests})
	if o.Hold {
		<-ctx.Done()
	}
	g.leave()
	if n := g.engine.Stats().WrongBytes; n > 0 {
		return fmt.Errorf("%d wrong bytes", n)
	}
	if n := g.engine.Live(); n > 0 {
		return fmt.Errorf("ended with %d of %d requests left: %w", n, len(requests), context.Cause(ctx))
	}
	return nil
}

// Limits of a fill.
const (
	fillWave   = 4096 // blocks of one save
	fillTries  = 100  // saves of one wave: an agent may be busy
	fillWithin = time.Minute
)

// filler is an engine whose only work is to save a chain of blocks under given hashes.
type filler struct {
	cfg     Config
	workers *Workers
	link    *Link
	step    uint64
	job     uint64
}

// Fill registers an engine with an agent, which must appear within attach, saves one block for each
// hash of a chain, in order, calls filled, and leaves. All hashes have one length, 1 to 32 bytes.
func Fill(ctx context.Context, cfg Config, where LinkConfig, hashes [][]byte, attach time.Duration,
	filled func()) error {
	cfg.Blocks, cfg.Groups = fillWave, 1
	if err := cfg.Validate(); err != nil {
		return err
	}
	w, err := NewWorkers(&cfg)
	if err != nil {
		return err
	}
	defer w.Close()
	f := &filler{cfg: cfg, workers: w, link: NewLink(cfg, where, w)}
	defer f.link.Close()
	wait, stop := context.WithTimeout(ctx, attach)
	defer stop()
	if err := f.link.Wait(wait); err != nil {
		return fmt.Errorf("no agent: %w", err)
	}
	var parent []byte
	for wave := range slices.Chunk(hashes, fillWave) {
		if err := f.wave(ctx, parent, wave); err != nil {
			return err
		}
		parent = wave[len(wave)-1]
	}
	filled()
	return nil
}

// wave computes blocks on all ranks and saves them, and retries where the agent is busy.
func (f *filler) wave(ctx context.Context, parent []byte, hashes [][]byte) error {
	f.step++
	k := &work{step: f.step}
	words := f.cfg.BlockBytes / layers / wordBytes
	s := Section{Parent: parent}
	for i, h := range hashes {
		sum := sha256.Sum256(h)
		seed := binary.LittleEndian.Uint64(sum[:])
		from := len(k.bases)
		for w := range words {
			k.bases = append(k.bases, seed+uint64(w))
		}
		k.pieces = append(k.pieces, piece{block: BlockID(i + 1), from: from, to: len(k.bases)})
		s.Hashes = append(s.Hashes, h...)
		s.Blocks = append(s.Blocks, BlockID(i+1))
	}
	f.workers.launch(k)
	defer k.done.Wait()
	for range fillTries {
		stored, err := f.try(ctx, s)
		if stored || err != nil {
			return err
		}
		sleep(ctx, redialFirst)
	}
	return errors.New("the agent did not take the blocks: pool full, or saves off")
}

// try saves once; it returns false if not everything was taken.
func (f *filler) try(ctx context.Context, s Section) (bool, error) {
	ctx, stop := context.WithTimeout(ctx, fillWithin)
	defer stop()
	f.job++
	j := &Job{ID: f.job, Kind: SaveJob, Step: f.step, Event: f.workers.event(f.step), Revoke: ^uint32(0),
		Sections: []Section{s}}
	if !f.link.Submit(j) {
		return false, ctx.Err()
	}
	for {
		select {
		case ev := <-f.link.Events():
			if ev.Job == f.job {
				return allStored(ev.Status), nil
			}
		case <-ctx.Done():
			return false, fmt.Errorf("save of %d blocks: %w", len(s.Blocks), ctx.Err())
		}
	}
}

// allStored reports whether every block is stored or was already; a nil status, of a lost agent, is
// neither.
func allStored(status []uint8) bool {
	for _, s := range status {
		if s > statusExists {
			return false
		}
	}
	return len(status) > 0
}
