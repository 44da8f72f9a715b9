package tierspec

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/pool/tier/transit"
	"github.com/kvagent/kvagent/settings"
)

// Settings are the settings of the tiers below the pool's memory.
type Settings struct {
	specs []*Spec
	state string // directory; empty: see stateDir
}

// AddFlags defines the settings.
func (t *Settings) AddFlags(f *pflag.FlagSet) {
	f.Var(Setting(&t.specs), "tier",
		"a store below the pool, nearest first, such as disk:/var/lib/kvagent?capacity=100GiB or redis://host:6379; "+
			"may be given several times (docs/TIERS.md)")
	f.StringVar(&t.state, "tier-state", "",
		"directory for what must outlive the agent: which spaces were reset; one for each agent; default: that of the "+
			"first disk tier, or kvagent in /var/lib, of a user other than root in $XDG_STATE_HOME or ~/.local/state")
}

// Check validates the combination of settings, and sets the default of --tier-state, which the
// socket directory may be part of.
func (t *Settings) Check(socketDir string) (err error) {
	var bad []error
	if t.state, err = t.stateDir(socketDir); err != nil {
		bad = append(bad, err)
	}
	names := map[string]bool{}
	for _, s := range t.specs {
		if names[s.Name] {
			bad = append(bad, fmt.Errorf("tier: %s: name %q is used twice, allowed: once (give one a name=)",
				Shown(s.Text), s.Name))
		}
		names[s.Name] = true
	}
	if len(t.specs) > tier.MaxTiers {
		bad = append(bad, fmt.Errorf("tier: %d tiers, allowed: at most %d", len(t.specs), tier.MaxTiers))
	}
	return errors.Join(bad...)
}

// stateDir returns the directory of the file of resets: the one that was given, that of the first
// disk tier, or a default. The default differs between agents of one user, by their socket
// directories, because each has its own resets.
func (t *Settings) stateDir(socketDir string) (string, error) {
	if t.state != "" || len(t.specs) == 0 {
		return t.state, nil
	}
	for _, s := range t.specs {
		if s.Scheme == SchemeDisk {
			return s.Path, nil
		}
	}
	base, err := defaultState()
	if err != nil || socketDir == settings.DefaultSocketDir() {
		return base, err
	}
	dir, err := filepath.Abs(socketDir)
	return filepath.Join(base, url.PathEscape(dir)), err
}

// systemState is the default directory of root's agent.
const systemState = "/var/lib/kvagent"

func defaultState() (string, error) {
	if os.Geteuid() == 0 {
		return systemState, nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "kvagent"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("tier-state must be given, as there is no default for it: %w", err)
	}
	return filepath.Join(home, ".local/state/kvagent"), nil
}

// TokensFile returns the file for the tokens that KV events need: beside the file of resets if a
// disk tier outlives the agent or, if memory alone does, beside the pool's file. Empty: nothing of
// which events tell outlives it, so prompts are kept in no file.
func (t *Settings) TokensFile(poolFile string) string {
	for _, s := range t.specs {
		if s.Scheme == SchemeDisk {
			return filepath.Join(t.state, "kvagent"+tokensSuffix)
		}
	}
	if poolFile != "" {
		return poolFile + tokensSuffix
	}
	return ""
}

const tokensSuffix = ".tokens"

// resetsFile is the file in the state directory.
const resetsFile = "kvagent-resets.json"

// Open opens the tiers below a pool. Without tiers it returns the pool itself. The returned
// function closes them. pace is that of tier.Options.
func (t *Settings) Open(
	p *dram.Pool, noSums bool, pace func(ctx context.Context, bytes int64) func(), log *zap.Logger,
) (pool.Memory, func() error, error) {
	if len(t.specs) == 0 {
		return p, func() error { return nil }, nil
	}
	if err := os.MkdirAll(t.state, 0o700); err != nil {
		return nil, nil, fmt.Errorf("tier-state: %w", err)
	}
	staging, err := transit.OpenStaging(tier.DefaultStaging)
	if err != nil {
		return nil, nil, err
	}
	closers := []func() error{staging.Close}
	fail := func(err error) (pool.Memory, func() error, error) {
		return nil, nil, errors.Join(err, closeAll(closers))
	}
	tiers := make([]tier.Tier, 0, len(t.specs))
	for _, spec := range t.specs {
		opened, err := spec.Open(&Needs{Spec: spec, Staging: staging,
			Log: log.With(zap.String("tier", spec.Name))})
		if err != nil {
			return fail(fmt.Errorf("tier: %s: %w", Shown(spec.Text), err))
		}
		closers = append(closers, opened.Close)
		one := spec.Tier
		one.Store, one.Local = opened.Store, opened.Local
		tiers = append(tiers, one)
		log.Info("tier", zap.String("tier", spec.Name), zap.String("store", Shown(spec.Text)),
			zap.Stringer("write", one.Write))
	}
	node, _ := os.Hostname() // empty: stored values name no source
	stack, err := tier.Open(p, tiers, tier.Options{
		Staging: staging, State: filepath.Join(t.state, resetsFile), NoSums: noSums, Node: node, Pace: pace,
		Log: func(name, what string, err error) { log.Warn(what, zap.String("tier", name), zap.Error(err)) },
	})
	if err != nil {
		return fail(settings.Invalid(err))
	}
	return stack, func() error { return errors.Join(stack.Close(), closeAll(closers)) }, nil
}

// closeAll calls the closers in the opposite order.
func closeAll(closers []func() error) (err error) {
	for i := len(closers) - 1; i >= 0; i-- {
		err = errors.Join(err, closers[i]())
	}
	return err
}
