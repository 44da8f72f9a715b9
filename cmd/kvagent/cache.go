package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent"
)

func cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Say what a running agent has stored, and remove it",
		Example: `  kvagent cache ls --model meta-llama/Llama-3.1-8B
  kvagent cache stat --tier disk
  kvagent cache rm --tenant acme`,
	}
	cmd.AddCommand(cacheListCommand(), cacheStatCommand(), cacheRemoveCommand())
	return cmd
}

// cacheSettings are those of the three commands.
type cacheSettings struct {
	dir                  *string
	space, model, tenant string
	tier                 string
	asJSON               bool
}

func cacheBase(s *cacheSettings, use, short, long string, run func(*cobra.Command, *cacheSettings) error) *cobra.Command {
	s.dir = socketDirSetting()
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long, Args: checkArgs(cobra.NoArgs),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return configError(fillSettings(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd, s) },
	}
	addSocketDir(cmd, s.dir)
	cmd.Flags().BoolVar(&s.asJSON, "json", false, "print what the agent says, as JSON")
	return cmd
}

// addFilter adds what picks spaces.
func (s *cacheSettings) addFilter(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.space, "space", "", "only the space with this fingerprint, or its first hex digits")
	cmd.Flags().StringVar(&s.model, "model", "", "only spaces of this model")
	cmd.Flags().StringVar(&s.tenant, "tenant", "", "only spaces of this tenant")
}

func (s *cacheSettings) query() string {
	q := url.Values{}
	for key, value := range map[string]string{"space": s.space, "model": s.model, "tenant": s.tenant} {
		if value != "" {
			q.Set(key, value)
		}
	}
	return "?" + q.Encode()
}

func cacheListCommand() *cobra.Command {
	s := &cacheSettings{}
	cmd := cacheBase(s, "ls", "List the spaces an agent knows", `Ls lists the spaces that engines registered since the agent started: everything besides the tokens that makes
a block, such as model, data type and tenant, under one fingerprint. Blocks are those in memory, of all their ranks.`, listCache)
	s.addFilter(cmd)
	return cmd
}

// askCache asks for what a filter picks; with --json it prints that, and ok is false.
func askCache(cmd *cobra.Command, s *cacheSettings) (st agent.CacheStatus, ok bool, err error) {
	body, err := newAdmin(*s.dir).get(cmd.Context(), "/cache"+s.query())
	if err != nil {
		return st, false, err
	}
	if s.asJSON {
		_, err = cmd.OutOrStdout().Write(body)
		return st, false, err
	}
	if err := json.Unmarshal(body, &st); err != nil {
		return st, false, fmt.Errorf("cache: %w", err)
	}
	return st, true, nil
}

func listCache(cmd *cobra.Command, s *cacheSettings) error {
	st, ok, err := askCache(cmd, s)
	if !ok {
		return err
	}
	return printSpaces(cmd.OutOrStdout(), st.Spaces)
}

func printSpaces(out io.Writer, spaces []agent.CacheSpace) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SPACE\tMODEL\tTENANT\tDTYPE\tGROUPS\tRANKS' SHARDS\tEPOCH\tENGINES\tBLOCKS")
	for i := range spaces {
		s := &spaces[i]
		blocks := "not counted"
		if s.Blocks >= 0 {
			blocks = thousands(int(s.Blocks))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n", s.Space, s.Model, s.Tenant, s.Dtype, s.Groups, s.Shards, s.Epoch, s.Engines, blocks)
	}
	return t.Flush()
}

func cacheStatCommand() *cobra.Command {
	s := &cacheSettings{}
	cmd := cacheBase(s, "stat", "Say how full memory and tiers are, and what they served", "", statCache)
	cmd.Flags().StringVar(&s.tier, "tier", "", "only this tier; memory is the pool")
	return cmd
}

func statCache(cmd *cobra.Command, s *cacheSettings) error {
	st, ok, err := askCache(cmd, s)
	if !ok {
		return err
	}
	t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "TIER\tSTATE\tUSED\tOF\tITEMS\tREAD\tNOT THERE\tWRITTEN\tNOT WRITTEN\tDAMAGED\tREAD RATE")
	names := []string{"memory"}
	if s.tier == "" || s.tier == "memory" {
		fmt.Fprintf(t, "memory\tup\t%s\t%s\t%s\t\t\t\t\t\t\n", humanSize(st.Pool.Used), humanSize(st.Pool.Capacity), thousands(int(st.Pool.Entries)))
	}
	for i := range st.Tiers {
		r := &st.Tiers[i]
		names = append(names, r.Name)
		if s.tier != "" && s.tier != r.Name {
			continue
		}
		of := "not known"
		if r.Capacity > 0 {
			of = humanSize(r.Capacity)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s/s\n", r.Name, r.State, humanSize(r.Used), of, thousands(int(r.Items)),
			thousands(int(r.Hits)), thousands(int(r.Misses)), thousands(int(r.Stored)), thousands(int(r.Dropped+r.Failed)), thousands(int(r.Corrupt)), humanSize(int64(r.FetchRate)))
	}
	for _, name := range names {
		if s.tier == "" || s.tier == name {
			return t.Flush()
		}
	}
	return configError(fmt.Errorf("tier: %q, allowed: %s", s.tier, strings.Join(names, ", ")))
}

func cacheRemoveCommand() *cobra.Command {
	s := &cacheSettings{}
	cmd := cacheBase(s, "rm", "Remove what is stored of some spaces", `Rm starts a new weights epoch of the spaces that --space, --model and --tenant pick, as a reset by an engine does: nothing
stored of them before is found again, in memory or in any tier, and their engines are told. Memory is free at once; tiers forget by
themselves. What this node stores of such a space from then on it no longer shares with others.`, removeCache)
	s.addFilter(cmd)
	return cmd
}

func removeCache(cmd *cobra.Command, s *cacheSettings) error {
	if s.space+s.model+s.tenant == "" {
		return configError(fmt.Errorf("nothing says what to remove, allowed: one or more of --space, --model, --tenant"))
	}
	body, err := newAdmin(*s.dir).post(cmd.Context(), "/cache/rm"+s.query())
	if err != nil {
		return err
	}
	if s.asJSON {
		_, err = cmd.OutOrStdout().Write(body)
		return err
	}
	var removed agent.Removed
	if err := json.Unmarshal(body, &removed); err != nil {
		return fmt.Errorf("cache rm: %w", err)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "removed what was stored of %d spaces\n", len(removed.Spaces))
	return printSpaces(cmd.OutOrStdout(), removed.Spaces)
}
