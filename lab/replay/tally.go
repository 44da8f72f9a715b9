package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/mockengine"
)

// addReport adds an engine's report.
func (r *replay) addReport(e *engine, report *mockengine.Report) {
	if report.Stats != nil {
		e.last, e.lost = *report.Stats, 0
	}
	for _, o := range report.Outcomes {
		q, ok := e.unfinished[o.ID]
		if !ok {
			continue
		}
		delete(e.unfinished, o.ID)
		if q.ID >= probeID {
			continue
		}
		r.done++
		if o.Failed != "" {
			r.failed = append(r.failed, fmt.Sprintf("request %d: %s", o.ID, o.Failed))
		}
		r.countHits(e, &q, &o)
	}
}

// countHits adds a request's blocks to its engine's columns. A request whose engine was killed
// finds in the second engine what it computed itself in the first: only what an earlier request had
// counts as a hit.
func (r *replay) countHits(e *engine, q *mockengine.Request, o *mockengine.Outcome) {
	known := 0
	for known < len(q.Prompt) && r.firstIn[q.Prompt[known]] < q.ID {
		known++
	}
	o.Own = min(o.Own, known)
	o.Pool = min(o.Pool, known-o.Own)
	e.requests++
	e.blocks += len(q.Prompt)
	e.own += o.Own
	e.pooled += o.Pool
	e.preempted += o.Preempted
	if o.Aborted {
		e.aborted++
	}
	for i, id := range q.Prompt {
		by, known := r.firstBy[id]
		if !known {
			r.firstBy[id] = e.number
		} else if i >= o.Own && i < o.Own+o.Pool && by != e.number {
			e.others++
		}
	}
}

// probe damages a block of the prompt that one engine saved last, and lets another one load all of
// them: its prompt is the same and one block longer.
func (r *replay) probe(ctx context.Context) error {
	var ids []uint64
	for i := range uint64(probeBlocks + 1) {
		ids = append(ids, probeID+i)
	}
	for i := range 2 {
		batches := make([][]mockengine.Request, len(r.engines))
		batches[i] = []mockengine.Request{{ID: probeID + uint64(i), Prompt: ids[:probeBlocks+i], Output: 1}}
		if err := r.stretch(ctx, batches, -1); err != nil {
			return err
		}
		if i == 0 {
			if err := r.flip(ctx, r.nodes[0], ids[:probeBlocks]); err != nil {
				return fmt.Errorf("flip a byte: %w", err)
			}
		}
	}
	return nil
}

// leave ends every engine and waits until the agent has forgotten them.
func (r *replay) leave(ctx context.Context) error {
	for _, e := range r.engines {
		e.wanted = true
		e.send(&mockengine.Command{Op: "leave"})
	}
	if err := r.wait(ctx, "leave", func(e *engine) bool { return e.left != nil }); err != nil {
		return err
	}
	close(r.leaving)
	if err := r.awaitWatches(ctx); err != nil { // an agent that was killed last is running again
		return err
	}
	ctx, stop := context.WithTimeout(ctx, emptyWithin)
	defer stop()
	for _, a := range r.nodes {
		st, err := a.empty(ctx)
		if err != nil {
			return err
		}
		o := &r.result
		o.LeasesLeft += st.Leases
		o.RegionsLeft += st.Regions
		o.EnginesLeft += st.Engines
		o.ImportsLeft += openImports(&st)
		r.noteCleanup(time.Duration(st.CleanupMaxMS * float64(time.Millisecond)))
		r.addSources(&st)
		o.SamplesMismatched += st.Sample.Saves.Mismatched + st.Sample.Loads.Mismatched
		o.OverDeadlineUS = max(o.OverDeadlineUS, st.LookupOverUS)
	}
	return nil
}
