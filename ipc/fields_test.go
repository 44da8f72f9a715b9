package ipc

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"unicode"
)

// The vectors hold a message's fields as JSON under the names of docs/PROTOCOL.md. They are the Go
// fields' names in snake case; fieldNames has the exceptions.

var fieldNames = map[string]string{"Regions.List": "regions", "Segments.List": "segments", "Done.Status": "statuses",
	"Offer.TTLMS": "ttl_ms", "Stages.List": "stages", "Steps.List": "steps"}

func fieldName(t reflect.Type, f reflect.StructField) string {
	if name, ok := fieldNames[t.Name()+"."+f.Name]; ok {
		return name
	}
	return snake(f.Name)
}

// snake turns HBMTokens into hbm_tokens and MaxVersion into max_version.
func snake(s string) string {
	var b strings.Builder
	r := []rune(s)
	for i, c := range r {
		edge := i > 0 && unicode.IsUpper(c) && (unicode.IsLower(r[i-1]) || i+1 < len(r) && unicode.IsLower(r[i+1]))
		if edge {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(c))
	}
	return b.String()
}

// toFields is v as JSON can hold it: bytes as hex, flags as 0 and 1.
func toFields(v reflect.Value) any {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return nil
		}
		return toFields(v.Elem())
	case reflect.Struct:
		fields := map[string]any{}
		for i := range v.NumField() {
			f := v.Type().Field(i)
			fields[fieldName(v.Type(), f)] = toFields(v.Field(i))
		}
		return fields
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			b := make([]byte, v.Len())
			reflect.Copy(reflect.ValueOf(b), v)
			return hex.EncodeToString(b)
		}
		all := make([]any, v.Len())
		for i := range all {
			all[i] = toFields(v.Index(i))
		}
		return all
	case reflect.Bool:
		if v.Bool() {
			return 1
		}
		return 0
	}
	return v.Interface()
}

// fromFields sets v from what a JSON decoder that uses json.Number made of the fields.
func fromFields(v reflect.Value, fields any) error {
	switch v.Kind() {
	case reflect.Pointer:
		if fields == nil {
			return nil
		}
		v.Set(reflect.New(v.Type().Elem()))
		return fromFields(v.Elem(), fields)
	case reflect.Struct:
		return structFromFields(v, fields.(map[string]any))
	case reflect.Slice, reflect.Array:
		return listFromFields(v, fields)
	case reflect.String:
		v.SetString(fields.(string))
		return nil
	case reflect.Bool:
		v.SetBool(fields.(json.Number) == "1")
		return nil
	}
	number := reflect.New(v.Type())
	if err := json.Unmarshal([]byte(fields.(json.Number)), number.Interface()); err != nil {
		return err
	}
	v.Set(number.Elem())
	return nil
}

func structFromFields(v reflect.Value, fields map[string]any) error {
	used := 0
	for i := range v.NumField() {
		name := fieldName(v.Type(), v.Type().Field(i))
		f, ok := fields[name]
		if !ok {
			continue
		}
		used++
		if err := fromFields(v.Field(i), f); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if used != len(fields) {
		return fmt.Errorf("%d of the fields %v are not in %s", len(fields)-used, fields, v.Type())
	}
	return nil
}

func listFromFields(v reflect.Value, fields any) error {
	if v.Type().Elem().Kind() == reflect.Uint8 {
		b, err := hex.DecodeString(fields.(string))
		if err != nil || len(b) == 0 {
			return err
		}
		if v.Kind() == reflect.Slice {
			v.Set(reflect.MakeSlice(v.Type(), len(b), len(b)))
		}
		reflect.Copy(v, reflect.ValueOf(b))
		return nil
	}
	all := fields.([]any)
	if len(all) == 0 {
		return nil
	}
	v.Set(reflect.MakeSlice(v.Type(), len(all), len(all)))
	for i := range all {
		if err := fromFields(v.Index(i), all[i]); err != nil {
			return err
		}
	}
	return nil
}
