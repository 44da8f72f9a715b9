package mixintest

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/promqltest"
)

// healthy are the series of an agent at work, a sample each minute, in the notation of promtool's
// unit tests: a start, and what is added for each of so many samples.
var healthy = map[string]string{
	`up{job="kvagent"}`:                                                   "1x120",
	`kvagent_start_time_seconds{job="kvagent"}`:                           "1x120",
	`kvagent_blocks_total{job="kvagent",op="save",status="ok"}`:           "0+100x120",
	`kvagent_blocks_total{job="kvagent",op="save",status="busy"}`:         "0+1x120", // retried later
	`kvagent_blocks_total{job="kvagent",op="load",status="corrupt"}`:      "0x120",
	`kvagent_tier_corrupt_total{job="kvagent",tier="disk"}`:               "0x120",
	`kvagent_tier_breaker_opened_total{job="kvagent",tier="disk"}`:        "0x120",
	`kvagent_tier_puts_total{job="kvagent",result="dropped",tier="disk"}`: "0x120",
	`kvagent_mover_lost_total{job="kvagent"}`:                             "0x120",
	`kvagent_mover_failing{job="kvagent"}`:                                "0x120",
	`kvagent_promises_total{event="made",job="kvagent"}`:                  "0+1000x120",
	`kvagent_promises_total{event="expired",job="kvagent"}`:               "0+10x120",
	`kvagent_lookups_total{job="kvagent",status="hit"}`:                   "0+10000x120",
	`kvagent_lookup_over_deadline_seconds_count{job="kvagent"}`:           "0+10x120",
	`kvagent_pool_used_bytes{job="kvagent"}`:                              "99x120", // full is usual
	`kvagent_pool_capacity_bytes{job="kvagent"}`:                          "100x120",
	`kvagent_cleanup_seconds_count{job="kvagent"}`:                        "0+2x120",
	`kvagent_cleanup_seconds_bucket{job="kvagent",le="2"}`:                "0+2x120",
}

// faults are the series that differ from healthy when an alert has to fire; "_" is no sample.
var faults = map[string]map[string]string{
	"KvagentDown":              {`up{job="kvagent"}`: "0x120"},
	"KvagentAbsent":            {`kvagent_start_time_seconds{job="kvagent"}`: "_x120"},
	"KvagentCorruptBlocks":     {`kvagent_blocks_total{job="kvagent",op="load",status="corrupt"}`: "0x95 1x24"},
	"KvagentTierCorrupt":       {`kvagent_tier_corrupt_total{job="kvagent",tier="disk"}`: "0x95 1x24"},
	"KvagentMoverLost":         {`kvagent_mover_lost_total{job="kvagent"}`: "0x95 1x24"},
	"KvagentTierBreakerOpened": {`kvagent_tier_breaker_opened_total{job="kvagent",tier="disk"}`: "0x95 1x24"},
	"KvagentTierPutsDropped":   {`kvagent_tier_puts_total{job="kvagent",result="dropped",tier="disk"}`: "0+1x120"},
	"KvagentPromisesNotKept":   {`kvagent_promises_total{event="expired",job="kvagent"}`: "0+60x120"},
	"KvagentLookupsLate":       {`kvagent_lookup_over_deadline_seconds_count{job="kvagent"}`: "0+110x120"},
	"KvagentPoolRefusesSaves":  {`kvagent_blocks_total{job="kvagent",op="save",status="busy"}`: "0+6x120"},
	"KvagentCleanupSlow":       {`kvagent_cleanup_seconds_bucket{job="kvagent",le="2"}`: "0+2x95 191+2x24"},
}

func TestAlertsFireOnTheirFaults(t *testing.T) {
	if firing := firing(t, nil); len(firing) > 0 {
		t.Errorf("nothing is wrong, and these fire: %v", firing)
	}
	for _, r := range readRules(t) {
		if r.Alert == "" {
			continue
		}
		fault := faults[r.Alert]
		if fault == nil {
			t.Errorf("%s: no fault in the table", r.Alert)
			continue
		}
		if got := firing(t, fault); !slices.Equal(got, []string{r.Alert}) {
			t.Errorf("%s: its fault makes these fire: %v", r.Alert, got)
		}
	}
}

// firing returns the alerts whose expressions hold after 100 minutes of these series.
func firing(t *testing.T, fault map[string]string) (names []string) {
	t.Helper()
	all := maps.Clone(healthy)
	for series := range fault {
		if all[series] == "" {
			t.Fatalf("%s is not among the healthy series", series)
		}
	}
	maps.Copy(all, fault)
	load := strings.Builder{}
	load.WriteString("load 1m\n")
	for _, series := range slices.Sorted(maps.Keys(all)) {
		load.WriteString("  " + series + " " + all[series] + "\n")
	}
	storage := promqltest.LoadedStorage(t, load.String())
	defer func() { _ = storage.Close() }()
	engine := promqltest.NewTestEngine(t, false, 0, 100_000)
	for _, r := range readRules(t) {
		if r.Alert == "" {
			continue
		}
		query, err := engine.NewInstantQuery(t.Context(), storage, nil, r.Expr, time.Unix(0, 0).Add(100*time.Minute))
		if err != nil {
			t.Fatalf("%s: %v", r.Alert, err)
		}
		result, err := query.Exec(t.Context()).Vector()
		if err != nil {
			t.Fatalf("%s: %v", r.Alert, err)
		}
		if len(result) > 0 {
			names = append(names, r.Alert)
		}
		query.Close()
	}
	return names
}
