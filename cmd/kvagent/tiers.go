package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/pool/tier/transit"
	"github.com/kvagent/kvagent/pool/tierspec"
	"github.com/kvagent/kvagent/settings"
	"github.com/kvagent/kvagent/transfer/pace"
)

// tierSettings are the settings of the tiers below the pool's memory.
type tierSettings struct {
	specs    []*tierspec.Spec
	state    string // directory; empty: the first disk tier's
	staging  int64  // bytes
	prefetch int64  // bytes; 0: an eighth of the pool
	prefill  prefillRate

	epochEvery time.Duration
}

func (t *tierSettings) addFlags(f *pflag.FlagSet) {
	t.staging = tier.DefaultStaging
	f.Var(tierspec.Setting(&t.specs), "tier",
		"a store below the pool, nearest first, such as disk:/var/lib/kvagent?capacity=100GiB or redis://host:6379; "+
			"may be given several times (docs/TIERS.md)")
	f.StringVar(&t.state, "tier-state", "",
		"directory for what must outlive the agent: which spaces were reset; "+
			"default: the directory of the first disk tier")
	f.Var(settings.Size(&t.staging, transit.MinStaging, transit.MaxStaging), "tier-staging",
		"memory for blocks on their way to and from tiers; a block larger than half of it stays in the pool")
	f.Var(settings.Size(&t.prefetch, 0, dram.MaxBytes), "prefetch-bytes",
		"most bytes that are being fetched from tiers at a time; 0 is an eighth of the pool")
	t.epochEvery = 5 * time.Second
	f.Var(settings.Duration(&t.epochEvery, tier.MinEpochEvery, tier.MaxEpochEvery), "tier-epoch-every",
		"interval at which shared tiers are checked for resets on other nodes")
	f.Var(&t.prefill, "prefill-tokens-per-second",
		"an engine's prefill rate: an answer is cut where a tier would take longer; 0 never cuts, learn measures the "+
			"rate")
}

// prefillRate is an engine's prefill rate in tokens a second, or a request to learn it. 0: answers
// are not cut.
type prefillRate struct {
	tokens int
	learn  bool
}

const learnPrefill = "learn"

func (r *prefillRate) Type() string { return "rate" }
func (r *prefillRate) String() string {
	if r.learn {
		return learnPrefill
	}
	return strconv.Itoa(r.tokens)
}

func (r *prefillRate) Set(text string) error {
	if text == learnPrefill {
		*r = prefillRate{learn: true}
		return nil
	}
	n := 0
	if err := (settings.Count(&n, 0, 1e9)).Set(text); err != nil {
		return fmt.Errorf("%w, or %s", err, learnPrefill)
	}
	*r = prefillRate{tokens: n}
	return nil
}

// check validates the combination of settings.
func (t *tierSettings) check() error {
	var bad []error
	names := map[string]bool{}
	shared := false
	for _, s := range t.specs {
		if names[s.Name] {
			bad = append(bad, fmt.Errorf("tier: %s: name %q is used twice, allowed: once (give one a name=)",
				tierspec.Shown(s.Text), s.Name))
		}
		names[s.Name] = true
		shared = shared || s.Scheme != tierspec.SchemeDisk
	}
	if len(t.specs) > tier.MaxTiers {
		bad = append(bad, fmt.Errorf("tier: %d tiers, allowed: at most %d", len(t.specs), tier.MaxTiers))
	}
	if shared && t.stateDir() == "" {
		bad = append(bad, errors.New("tier-state must be given: there is a store that outlives the agent, and no "+
			"disk tier whose directory could keep the resets"))
	}
	return errors.Join(bad...)
}

// stateDir returns the directory of the file of resets.
func (t *tierSettings) stateDir() string {
	if t.state != "" {
		return t.state
	}
	for _, s := range t.specs {
		if s.Scheme == tierspec.SchemeDisk {
			return s.Path
		}
	}
	return ""
}

// tokensFile returns the file for the tokens that KV events need: beside the file of resets if a
// disk tier outlives the agent or, if memory alone does, beside the pool's file. Empty: nothing of
// which events tell outlives it, so prompts are kept in no file.
func (s *serveSettings) tokensFile() string {
	for _, t := range s.tiers.specs {
		if t.Scheme == tierspec.SchemeDisk {
			return filepath.Join(s.tiers.stateDir(), "kvagent"+tokensSuffix)
		}
	}
	if s.dramPath != "" {
		return s.dramPath + tokensSuffix
	}
	return ""
}

const tokensSuffix = ".tokens"

// resetsFile is the file in the state directory.
const resetsFile = "kvagent-resets.json"

// openTiers opens the tiers below a pool. Without tiers it returns the pool itself. The returned
// function closes them.
func openTiers(
	p *dram.Pool, s *serveSettings, pacer *pace.Pacer, log *zap.Logger,
) (agent.Pool, func() error, error) {
	t := &s.tiers
	if len(t.specs) == 0 {
		return p, func() error { return nil }, nil
	}
	if err := os.MkdirAll(t.stateDir(), 0o700); err != nil {
		return nil, nil, fmt.Errorf("tier-state: %w", err)
	}
	staging, err := transit.OpenStaging(t.staging)
	if err != nil {
		return nil, nil, err
	}
	closers := []func() error{staging.Close}
	fail := func(err error) (agent.Pool, func() error, error) {
		return nil, nil, errors.Join(err, closeAll(closers))
	}
	tiers := make([]tier.Tier, 0, len(t.specs))
	for _, spec := range t.specs {
		opened, err := spec.Open(&tierspec.Needs{Spec: spec, Staging: staging,
			Log: log.With(zap.String("tier", spec.Name))})
		if err != nil {
			return fail(fmt.Errorf("tier: %s: %w", tierspec.Shown(spec.Text), err))
		}
		closers = append(closers, opened.Close)
		one := spec.Tier
		one.Store, one.Local = opened.Store, opened.Local
		tiers = append(tiers, one)
		log.Info("tier", zap.String("tier", spec.Name), zap.String("store", tierspec.Shown(spec.Text)),
			zap.Stringer("write", one.Write))
	}
	o := t.options(s, staging, log)
	o.Pace = func(ctx context.Context, bytes int64) func() { return pacer.Await(ctx, pace.Behind, bytes) }
	stack, err := tier.Open(p, tiers, o)
	if err != nil {
		return fail(settings.Invalid(err))
	}
	return stack, func() error { return errors.Join(stack.Close(), closeAll(closers)) }, nil
}

func (t *tierSettings) options(s *serveSettings, staging *transit.Staging, log *zap.Logger) tier.Options {
	node, _ := os.Hostname() // empty: stored values name no source
	return tier.Options{
		PrefetchBytes: t.prefetch, PrefillTokens: float64(t.prefill.tokens), LearnPrefill: t.prefill.learn,
		Staging:    staging,
		State:      filepath.Join(t.stateDir(), resetsFile),
		EpochEvery: t.epochEvery,
		NoSums:     s.integrity == settings.IntegrityHeader, Node: node,
		Log: func(name, what string, err error) { log.Warn(what, zap.String("tier", name), zap.Error(err)) },
	}
}

// closeAll calls the closers in the opposite order.
func closeAll(closers []func() error) (err error) {
	for i := len(closers) - 1; i >= 0; i-- {
		err = errors.Join(err, closers[i]())
	}
	return err
}
