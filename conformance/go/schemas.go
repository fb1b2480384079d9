package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/twmb/franz-go/pkg/sr"
)

const (
	orderSchema = `{"type":"record","name":"Order","fields":[{"name":"id","type":"long"}]}`
	widerSchema = `{"type":"record","name":"Order","fields":[{"name":"id","type":"long"},{"name":"note","type":"string","default":""}]}`
	wrongSchema = `{"type":"record","name":"Order","fields":[{"name":"id","type":"string"}]}`
)

// schemas is franz-go's client of the schema registry.
func schemas(t *trial, r *report) {
	if t.registry == "" {
		return
	}
	r.check("register, look up, and read by id and version", t.registered)
	r.check("compatibility: check, set, reset", t.compatibility)
	r.check("references, and deletion in two steps", t.references)
	r.check("encode and decode", t.serde)
}

func (t *trial) registryClient() (*sr.Client, error) {
	return sr.NewClient(sr.URLs(t.registry))
}

// refused complains unless an error has the registry's code.
func refused(what string, code int, err error) error {
	var response *sr.ResponseError
	if !errors.As(err, &response) || response.ErrorCode != code {
		return fmt.Errorf("%s: expected the code %d, got %v", what, code, err)
	}
	return nil
}

func (t *trial) registered(ctx context.Context) error {
	client, err := t.registryClient()
	if err != nil {
		return err
	}
	subject := t.name("subject")
	made, err := client.CreateSchema(ctx, subject, sr.Schema{Schema: orderSchema})
	if err != nil {
		return err
	}
	again, err := client.RegisterSchema(ctx, subject, sr.Schema{Schema: orderSchema}, 0, 0)
	if err := errors.Join(err, equal("id", made.ID, again), equal("version", 1, made.Version)); err != nil {
		return err
	}
	byID, err := client.SchemaByID(ctx, made.ID)
	if err := errors.Join(err, equal("schema by id", orderSchema, byID.Schema)); err != nil {
		return err
	}
	text, err := client.SchemaTextByVersion(ctx, subject, -1)
	if err := errors.Join(err, equal("text", orderSchema, text)); err != nil {
		return err
	}
	uses, err := client.SubjectsByID(ctx, made.ID)
	if err != nil || !slices.Contains(uses, subject) {
		return fmt.Errorf("subjects of the id: %v %v", uses, err)
	}
	subjects, err := client.Subjects(ctx)
	if err != nil || !slices.Contains(subjects, subject) {
		return fmt.Errorf("subjects: %v %v", subjects, err)
	}
	types, err := client.SupportedTypes(ctx)
	if err := errors.Join(err, equal("types", 3, len(types))); err != nil {
		return err
	}
	_, err = client.LookupSchema(ctx, subject, sr.Schema{Schema: widerSchema})
	return refused("an unknown schema", 40403, err)
}

func (t *trial) compatibility(ctx context.Context) error {
	client, err := t.registryClient()
	if err != nil {
		return err
	}
	subject := t.name("subject")
	if _, err := client.CreateSchema(ctx, subject, sr.Schema{Schema: orderSchema}); err != nil {
		return err
	}
	verbose := sr.WithParams(ctx, sr.Verbose)
	wrong, err := client.CheckCompatibility(verbose, subject, -1, sr.Schema{Schema: wrongSchema})
	if err != nil || wrong.Is || len(wrong.Messages) == 0 {
		return fmt.Errorf("an incompatible schema: %v %v", wrong, err)
	}
	_, err = client.CreateSchema(ctx, subject, sr.Schema{Schema: wrongSchema})
	if err := refused("an incompatible schema", 409, err); err != nil {
		return err
	}
	set := client.SetCompatibility(ctx, sr.SetCompatibility{Level: sr.CompatNone}, subject)
	if err := errors.Join(set[0].Err, equal("level", sr.CompatNone, client.Compatibility(ctx, subject)[0].Level)); err != nil {
		return err
	}
	if _, err := client.CreateSchema(ctx, subject, sr.Schema{Schema: wrongSchema}); err != nil {
		return err
	}
	return client.ResetCompatibility(ctx, subject)[0].Err
}

func (t *trial) references(ctx context.Context) error {
	client, err := t.registryClient()
	if err != nil {
		return err
	}
	inner, outer := t.name("subject"), t.name("subject")
	if _, err := client.CreateSchema(ctx, inner, sr.Schema{Schema: `syntax = "proto3"; package p; message In { int32 a = 1; }`, Type: sr.TypeProtobuf}); err != nil {
		return err
	}
	schema := sr.Schema{
		Schema:     `syntax = "proto3"; import "in.proto"; message Out { p.In in = 1; }`,
		Type:       sr.TypeProtobuf,
		References: []sr.SchemaReference{{Name: "in.proto", Subject: inner, Version: 1}},
	}
	if _, err := client.CreateSchema(ctx, outer, schema); err != nil {
		return err
	}
	users, err := client.SchemaReferences(ctx, inner, 1)
	if err := errors.Join(err, equal("references", 1, len(users))); err != nil {
		return err
	}
	_, err = client.DeleteSubject(ctx, inner, sr.SoftDelete)
	if err := refused("deleting what is referred to", 42206, err); err != nil {
		return err
	}
	for _, subject := range []string{outer, inner} {
		if _, err := client.DeleteSubject(ctx, subject, sr.SoftDelete); err != nil {
			return err
		}
		if _, err := client.DeleteSubject(ctx, subject, sr.HardDelete); err != nil {
			return err
		}
	}
	_, err = client.SubjectVersions(ctx, outer)
	return refused("a deleted subject", 40401, err)
}

func (t *trial) serde(ctx context.Context) error {
	client, err := t.registryClient()
	if err != nil {
		return err
	}
	made, err := client.CreateSchema(ctx, t.name("subject"), sr.Schema{Schema: `{"type":"object","title":"go"}`, Type: sr.TypeJSON})
	if err != nil {
		return err
	}
	var header sr.ConfluentHeader
	payload, err := header.AppendEncode(nil, made.ID, nil)
	if err != nil {
		return err
	}
	id, _, err := header.DecodeID(payload)
	if err != nil {
		return err
	}
	found, err := client.SchemaByID(ctx, id)
	return errors.Join(err, equal("type", sr.TypeJSON, found.Type))
}
